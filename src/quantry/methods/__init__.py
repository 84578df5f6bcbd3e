"""Methods: transforms, fits and rounders, one file each."""
