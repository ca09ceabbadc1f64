"""Engines that only place supervisors and restart them: Slurm and Kubernetes. Leases and results stay fedemu's."""
