"""One run on many ranks: meshes, shards, splits and pipelines, on the engines of torch."""
