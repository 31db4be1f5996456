"""PT2E annotations and quantisation modes for XNNPACK."""
