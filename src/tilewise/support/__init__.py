"""What the other folders share that is not about attention: caches, files that outlast a process, package versions."""
