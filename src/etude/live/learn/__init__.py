"""A window of the log becomes the next version: labels, filters, weights and advantages, then the trainer."""
