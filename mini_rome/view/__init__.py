"""The trajectory viewer: what a run left behind as one static page. `data` reads, `page` writes."""
