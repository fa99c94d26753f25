"""The pages: each module turns the parameters of a URL into what its template shows."""
