"""Plans that `tilecast bundle` measures, one for each kind of chip."""
