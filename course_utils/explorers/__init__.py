"""Interactive pictures, each computed from real tensors."""
