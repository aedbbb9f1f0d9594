"""What `muster explain --devices` shows: the devices and network adapters of this machine, and how they are linked."""
