"""What the hardware does to a pipeline.  No torch, no triton, no GPU."""
