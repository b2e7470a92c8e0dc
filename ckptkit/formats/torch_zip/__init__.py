"""The zip format of torch.save since 1.6: read, write, edit in place and recover it."""
