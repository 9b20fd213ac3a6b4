"""A job carried out from start to end: its checks, its loop, and the files it leaves."""
