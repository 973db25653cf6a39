"""click commands: parse, call one function, print."""
