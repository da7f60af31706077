"""Measure a served model: speeds by a client's clock beside the server, what the card did meanwhile, what others got."""
