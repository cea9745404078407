"""Configuration: what can be set (`schema`), how it is read (`load`, `flags`) and checked (`validate`)."""
