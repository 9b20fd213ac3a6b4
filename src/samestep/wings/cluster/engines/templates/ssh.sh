#!/bin/bash
<<head>>
# The folder it is run in, and its Python, must be there on every host.
<<setup>>
<<on_hosts>>
exec <<train>>
