"""`muster bench`: muster beside a peer, in one run, with what the machine can do at best beside both."""
