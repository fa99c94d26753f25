"""The pages: each module turns the parameters of a URL into the values of its template."""
