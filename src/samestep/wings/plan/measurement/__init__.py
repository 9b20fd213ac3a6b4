"""The verb `measure`: microbenchmarks of this machine, its hardware profile, and measured steps that refit the profile."""
