"""Strangers run nothing, overwrite nothing and end nobody's run: hosts, checkpoints, folders and files that are not trusted."""
