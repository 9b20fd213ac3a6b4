#!/bin/bash
<<head>>
# The job file is sent with the folder it is run in; the run folder must be one that all nodes see.
<<setup>>
exec <<submit>> --submission-id "<<run>>-$(date +%s)" -- \
    <<driver>>
