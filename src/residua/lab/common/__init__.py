"""What the rooms of the laboratory share, each thing once: files, locks, digests, statistics, tables."""
