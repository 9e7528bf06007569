"""A Mooncake pool for one machine: `local` starts, stops and shows it, `diagnosis` says why one does not answer."""
