"""The mapping of tables: names, rules, options, expressions of `filter` and `set`. Pure."""
