"""Facts and checks of this machine, as data."""
