"""The Console: static files, served as they are (see index.html and app.js)."""
