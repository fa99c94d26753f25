package io.github.sparkis;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.security.spec.InvalidKeySpecException;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import javax.net.ssl.KeyManager;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLParameters;
import javax.net.ssl.SSLSocket;
import javax.net.ssl.TrustManager;
import javax.net.ssl.TrustManagerFactory;

/**
 * The address of a state server, and how to connect to it: {@code redis://HOST:PORT}, {@code rediss://} for TLS, with
 * {@code :PASSWORD@} or {@code USER:PASSWORD@} before the host.
 *
 * <p>TLS is that of other sparkis processes: with a CA, its servers are trusted; without one, the own certificate alone.
 * They may have any host name, because addresses of servers change. Without files, Java's own CAs and the host name decide.
 */
final class ServerAddress {
    private static final int DEFAULT_PORT = 6379;
    private static final String KEY_BEGINS = "-----BEGIN PRIVATE KEY-----";
    private static final String KEY_ENDS = "-----END PRIVATE KEY-----";
    private static final String CERTIFICATE_BEGINS = "-----BEGIN CERTIFICATE-----";
    private static final String CERTIFICATE_ENDS = "-----END CERTIFICATE-----";
    private static final String[] KEY_TYPES = {"RSA", "EC", "EdDSA"};

    final String password;
    private final String user;
    private final String host;
    private final int port;
    private final boolean isTls;
    private final String certFile;
    private final String keyFile;
    private final String caCertFile;

    /**
     * @param tlsFiles the paths of a certificate, of its key (PKCS#8) and of a CA, as PEM; empty: none
     */
    ServerAddress(String url, String[] tlsFiles) {
        URI parsed = parsed(url);
        isTls = parsed.getScheme().equals("rediss");
        host = parsed.getHost().replace("[", "").replace("]", "");
        port = parsed.getPort() < 0 ? DEFAULT_PORT : parsed.getPort();
        String login = parsed.getUserInfo() == null ? "" : parsed.getUserInfo();
        int colon = login.indexOf(':');
        user = colon < 0 ? login : login.substring(0, colon);
        password = colon < 0 ? "" : login.substring(colon + 1);
        certFile = tlsFiles[0];
        keyFile = tlsFiles[1];
        caCertFile = tlsFiles[2];
    }

    private static URI parsed(String url) {
        try {
            URI parsed = new URI(url);
            if (parsed.getHost() != null && ("redis".equals(parsed.getScheme()) || "rediss".equals(parsed.getScheme()))) {
                return parsed;
            }
        } catch (URISyntaxException error) {
            // Its message has the password.
        }
        throw new IllegalArgumentException("a server's address is redis://[USER:PASSWORD@]HOST:PORT, or rediss://...; "
            + "special characters of a password are written as %XX");
    }

    /** The address without its password, for messages. */
    @Override
    public String toString() {
        return (host.indexOf(':') < 0 ? host : "[" + host + "]") + ":" + port;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof ServerAddress && names().equals(((ServerAddress) other).names());
    }

    @Override
    public int hashCode() {
        return names().hashCode();
    }

    private List<Object> names() {
        return Arrays.asList(new Object[] {host, port, isTls, user, password, certFile, keyFile, caCertFile});
    }

    /** The command that logs in. */
    Object[] login() {
        return user.isEmpty() ? new Object[] {"AUTH", password} : new Object[] {"AUTH", user, password};
    }

    Socket connect(int connectTimeoutMs, int timeoutMs) throws IOException {
        Socket socket = new Socket();
        try {
            socket.connect(new InetSocketAddress(host, port), connectTimeoutMs);
            socket.setTcpNoDelay(true);
            socket.setSoTimeout(timeoutMs);
            return isTls ? encrypted(socket) : socket;
        } catch (GeneralSecurityException error) {
            socket.close();
            throw new IOException(error.toString());
        } catch (IOException error) {
            socket.close();
            throw error;
        }
    }

    private Socket encrypted(Socket socket) throws IOException, GeneralSecurityException {
        List<Certificate> own = certificatesIn(certFile);
        List<Certificate> trusted = caCertFile.isEmpty() && !own.isEmpty() ? own.subList(0, 1) : certificatesIn(caCertFile);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(caCertFile.isEmpty() || own.isEmpty() ? null : keys(own), trust(trusted), null);
        SSLSocket encrypted = (SSLSocket) context.getSocketFactory().createSocket(socket, host, port, true);
        if (trusted.isEmpty()) {
            SSLParameters parameters = encrypted.getSSLParameters();
            parameters.setEndpointIdentificationAlgorithm("HTTPS");
            encrypted.setSSLParameters(parameters);
        }
        encrypted.startHandshake();
        return encrypted;
    }

    private static TrustManager[] trust(List<Certificate> trusted) throws IOException, GeneralSecurityException {
        KeyStore store = trusted.isEmpty() ? null : emptyStore();
        for (int index = 0; index < trusted.size(); index++) {
            store.setCertificateEntry("trusted-" + index, (Certificate) trusted.get(index));
        }
        TrustManagerFactory factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        factory.init(store);
        return factory.getTrustManagers();
    }

    private KeyManager[] keys(List<Certificate> own) throws IOException, GeneralSecurityException {
        KeyStore store = emptyStore();
        Certificate[] chain = (Certificate[]) own.toArray(new Certificate[own.size()]);
        store.setKeyEntry("own", keyIn(text(keyFile)), new char[0], chain);
        KeyManagerFactory factory = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
        factory.init(store, new char[0]);
        return factory.getKeyManagers();
    }

    private static KeyStore emptyStore() throws IOException, GeneralSecurityException {
        KeyStore store = KeyStore.getInstance("PKCS12");
        store.load(null, null);
        return store;
    }

    private static String text(String path) throws IOException {
        return new String(Files.readAllBytes(Paths.get(path)), StandardCharsets.ISO_8859_1);
    }

    private static List<Certificate> certificatesIn(String path) throws IOException, GeneralSecurityException {
        String pem = path.isEmpty() ? "" : text(path);
        CertificateFactory factory = CertificateFactory.getInstance("X.509");
        List<Certificate> found = new ArrayList<Certificate>();
        int begin = pem.indexOf(CERTIFICATE_BEGINS);
        while (begin >= 0) {
            int end = pem.indexOf(CERTIFICATE_ENDS, begin);
            byte[] der = decoded(pem, begin + CERTIFICATE_BEGINS.length(), end);
            found.add(factory.generateCertificate(new ByteArrayInputStream(der)));
            begin = pem.indexOf(CERTIFICATE_BEGINS, begin + 1);
        }
        return found;
    }

    private static PrivateKey keyIn(String pem) throws GeneralSecurityException {
        int begin = pem.indexOf(KEY_BEGINS);
        if (begin < 0) {
            throw new InvalidKeySpecException("the key is not in PKCS#8; convert it: openssl pkey -in KEY -out NEW");
        }
        byte[] der = decoded(pem, begin + KEY_BEGINS.length(), pem.indexOf(KEY_ENDS, begin));
        GeneralSecurityException last = null;
        for (int index = 0; index < KEY_TYPES.length; index++) {
            try {
                return KeyFactory.getInstance(KEY_TYPES[index]).generatePrivate(new PKCS8EncodedKeySpec(der));
            } catch (InvalidKeySpecException error) {
                last = error;
            }
        }
        throw last;
    }

    private static byte[] decoded(String pem, int begin, int end) throws GeneralSecurityException {
        if (end < 0) {
            throw new InvalidKeySpecException("the PEM text of a certificate or of its key has no end");
        }
        return Base64.getMimeDecoder().decode(pem.substring(begin, end).getBytes(StandardCharsets.US_ASCII));
    }
}
