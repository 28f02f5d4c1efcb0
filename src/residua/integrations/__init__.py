"""Our backbone in other people's engines. A module here needs its engine, and nothing else imports it."""
