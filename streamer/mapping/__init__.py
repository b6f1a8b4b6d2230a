"""Which table goes where: names, rules, options, expressions of `filter` and `set`. Pure."""
