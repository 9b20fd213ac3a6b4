#!/bin/bash
<<head>>
# Run it on every node; torchrun starts the ranks again where one fails, and they resume.
<<setup>>
exec <<torchrun>> \
    --no-python <<train>>
