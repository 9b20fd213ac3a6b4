"""The wing `cluster`: runs on several hosts.

engines/      the scripts of Slurm, Kubernetes, mpirun, ssh, torchrun and Ray       `samestep submit`
diagnosis/    what is wrong with the hosts of an allocation                         `samestep doctor`
hosts/        one run on several hosts without a launcher: they meet, one leads     `samestep train --nodes`
"""
