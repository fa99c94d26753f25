package tests;

import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStreamWriter;
import java.io.UncheckedIOException;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;

/**
 * Sends each row of a query to a {@code RowReceiver} (row_receiver.py) as soon as the query emits it.
 *
 * <p>A line has the cells of a row between tabs. {@code close} without an error waits until the receiver has all rows.
 */
public final class RowSender extends ForeachWriter<Row> {
    private static final int FLUSH_EVERY_MS = 5;

    private final String host;
    private final int port;
    private final String run;
    private transient Socket socket;
    private transient BufferedWriter out;
    private transient volatile boolean isOpen;

    public RowSender(String host, int port, String run) {
        this.host = host;
        this.port = port;
        this.run = run;
    }

    @Override
    public boolean open(long partition, long batch) {
        try {
            socket = new Socket(host, port);
            socket.setTcpNoDelay(true);
            out = new BufferedWriter(new OutputStreamWriter(socket.getOutputStream(), StandardCharsets.UTF_8));
            write("open", run, batch, partition);
            out.flush();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        isOpen = true;
        Thread flushing = new Thread(this::flush, "row-sender");
        flushing.setDaemon(true);
        flushing.start();
        return true;
    }

    @Override
    public synchronized void process(Row row) {
        try {
            write("row", System.currentTimeMillis(), row.getString(0), row.getLong(1), row.getLong(2), row.getLong(3));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    @Override
    public synchronized void close(Throwable error) {
        isOpen = false;
        if (socket == null) {
            return;
        }
        try (Socket ending = socket) {
            if (error == null) {
                write("close");
                out.flush();
                InputStreamReader replies = new InputStreamReader(ending.getInputStream(), StandardCharsets.UTF_8);
                if (new BufferedReader(replies).readLine() == null) {
                    throw new IOException("the receiver ended before it had all rows");
                }
            }
        } catch (IOException failed) {
            throw new UncheckedIOException(failed);
        }
    }

    private void write(Object... cells) throws IOException {
        StringBuilder line = new StringBuilder();
        for (Object cell : cells) {
            line.append(cell).append('\t');
        }
        line.setCharAt(line.length() - 1, '\n');
        out.append(line);
    }

    private void flush() {
        try {
            while (isOpen) {
                Thread.sleep(FLUSH_EVERY_MS);
                synchronized (this) {
                    if (isOpen) {
                        out.flush();
                    }
                }
            }
        } catch (IOException | InterruptedException error) {
            // The next row, or close(), finds the connection broken.
        }
    }
}
