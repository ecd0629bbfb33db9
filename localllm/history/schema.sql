-- Version 1 of the database of chats. A blank line ends a statement.
CREATE TABLE chats (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    system TEXT NOT NULL DEFAULT '',
    params_json TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL,
    updated REAL NOT NULL,
    leaf_id INTEGER
);

CREATE INDEX chats_by_time ON chats (updated DESC);

CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    parent_id INTEGER,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    reasoning TEXT NOT NULL DEFAULT '',
    tool_calls TEXT NOT NULL DEFAULT '[]',
    model TEXT NOT NULL DEFAULT '',
    params_json TEXT NOT NULL DEFAULT '{}',
    stats_json TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL,
    status TEXT NOT NULL DEFAULT 'done',
    writer TEXT NOT NULL DEFAULT ''
);

CREATE INDEX messages_by_chat ON messages (chat_id, created);

CREATE INDEX messages_streaming ON messages (status) WHERE status = 'streaming';

CREATE VIRTUAL TABLE messages_fts USING fts5 (content, tokenize = "unicode61 remove_diacritics 2", prefix = '2 3');

CREATE TRIGGER messages_added AFTER INSERT ON messages WHEN new.status <> 'streaming' BEGIN
    INSERT INTO messages_fts (rowid, content) VALUES (new.id, new.content);
END;

CREATE TRIGGER messages_changed AFTER UPDATE OF content, status ON messages WHEN new.status <> 'streaming' BEGIN
    DELETE FROM messages_fts WHERE rowid = old.id;
    INSERT INTO messages_fts (rowid, content) VALUES (new.id, new.content);
END;

CREATE TRIGGER messages_removed AFTER DELETE ON messages BEGIN
    DELETE FROM messages_fts WHERE rowid = old.id;
END;
