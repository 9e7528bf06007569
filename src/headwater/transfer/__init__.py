"""The executor: device and host memory, and the copies between them. The only room with tensors; decides nothing."""
