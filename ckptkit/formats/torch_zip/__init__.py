"""The formats of torch.save: one pickle machine, and the containers around it."""
