"""ForestColl finds the fastest trees for collectives on a network; `forest` runs the other modules."""
