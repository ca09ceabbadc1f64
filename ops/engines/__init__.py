"""Engines that only place supervisors and restart them: Slurm, Kubernetes and Ray. Leases and results stay fedemu's."""
