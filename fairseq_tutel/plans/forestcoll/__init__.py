"""ForestColl, the fastest trees of a network: `forest` takes the steps of the other modules in turn."""
