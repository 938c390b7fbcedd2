"""Check, then time: attention of this package beside the attention of others."""
