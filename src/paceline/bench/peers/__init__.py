"""Other engines as arms: one small file each. None is a dependency; one that is not installed is left out by name."""
