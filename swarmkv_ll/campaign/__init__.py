"""The benchmark campaign: what is measured, in which order, and what comes of it."""
