"""The hooks that come with the library, by theme."""
