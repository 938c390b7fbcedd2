"""What backends share and dispatch needs of them, beside the modules that ``backend=`` names."""
