"""What a block's bytes look like: planes, sizes, offsets, shards, frames. Arithmetic only, no tensor and no file."""
