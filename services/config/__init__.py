"""The TOML schema, one file per section, and the one ordered resolver. No torch."""
