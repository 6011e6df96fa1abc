"""Result rows on disk: the Arrow schema, immutable fragments, the store and its lock."""
