"""Result rows on disk: the Arrow schema, the log and files of rows, the store and its lock."""
