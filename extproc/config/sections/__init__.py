"""The sections of the configuration file, by what they are about."""
