"""Reports: result folders in, one page out that says which configuration to use and why."""
