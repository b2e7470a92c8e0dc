"""Is it whole, and what does it weigh: checkpoints read to their last byte, by several threads, in constant memory."""
