"""Methods: transforms of a block, fits of a grid's parameters, rounders onto a grid; one file each."""
