package clients;

import java.io.File;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;

/** A CA as the file that Java's clients read. */
final class TrustStore {
    /** Java reads no certificate of a file without a password. */
    static final char[] PASSWORD = "password".toCharArray();

    private TrustStore() {}

    static File of(File pem) {
        try (FileInputStream input = new FileInputStream(pem)) {
            KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(input));
            File file = File.createTempFile("truststore", ".p12");
            file.deleteOnExit();
            try (FileOutputStream output = new FileOutputStream(file)) {
                store.store(output, PASSWORD);
            }
            return file;
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }
}
