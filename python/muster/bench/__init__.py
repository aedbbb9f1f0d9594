"""`muster bench` compares muster with a peer in one run, and shows the best that the machine can do."""
