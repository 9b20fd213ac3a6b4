#!/bin/bash
<<head>>
# A run that gets SIGTERM saves and ends with status 143; the same script resumes it.
<<setup>>
<<address>>
MASTER_PORT=<<port>>
export MASTER_ADDR MASTER_PORT

# Asked to end, mpirun asks the ranks, which save; Open MPI kills those that take longer than a second.
stopped=0
trap 'stopped=1; kill -TERM $!' TERM
<<mpirun>> \
    <<train>> &
wait $!
status=$?
if [ $stopped -eq 1 ]; then
    wait $!  # the trap has ended the first wait
    exit 143
fi
exit $status
